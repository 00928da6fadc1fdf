"""The emulated OBS: one rule, what is judged is what is sent on.

``proxy`` reads a request into a value (``request``), finds who signed it (``signatures``), checks
its permissions, and sends the object store a new request that is built from this value alone.
``names`` and ``body`` translate what the store (``seaweedfs``) would change or does not check.
``client`` is the service's own client, which uses the proxy like everyone else.
"""
