"""Nodes of a training job on Huawei Cloud's ModelArts, or on an emulator of it.

``request`` makes the body of the request, ``client`` has the service's operations, ``state``
determines the status of a job, and ``logs`` joins the windows of each log that the service returns.
Start with ``backend.ModelArtsBackend``.
"""
