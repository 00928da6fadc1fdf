"""Nodes as pods, run by Kubernetes itself or by an operator: Volcano, the MPI or MindSpore one.

``request`` makes the manifests, from ``pod`` and the engine's own module, which has a subclass of
``engine.Engine``. ``discovery`` finds which engines a cluster offers. ``kubeconfig`` and ``client``
connect to the API server, ``state`` and ``events`` determine the status of a job, ``logs`` follows
its pods, and ``kueue`` stops a job that Kueue would resume. Start with
``backend.KubernetesBackend``.
"""
