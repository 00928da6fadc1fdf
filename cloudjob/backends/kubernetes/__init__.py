"""Jobs on Kubernetes, run by an operator that the cluster has."""
