"""Nodes of a training job on Huawei Cloud's ModelArts, or on an emulator of it.

``request`` makes the body of the request, ``client`` has the service's operations, ``state`` reads
where a job stands, and ``logs`` joins the windows that the service shows of each log. Start with
``backend.ModelArtsBackend``.
"""
