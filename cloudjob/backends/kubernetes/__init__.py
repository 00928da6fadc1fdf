"""Nodes as pods, run by an operator that the cluster has: Volcano, the MPI or MindSpore operator.

``request`` makes the manifests, from ``pod`` and the operator's own module, which has a subclass of
``engine.Engine``. ``kubeconfig`` and ``client`` connect to the API server, ``state`` and
``events`` determine the status of a job, and ``logs`` follows its pods. Start with
``backend.KubernetesBackend``.
"""
