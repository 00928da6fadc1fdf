"""A ModelArts on this machine: the API, IAM and OBS, in front of the process and docker backends."""
