"""A ModelArts on this machine: API, IAM and OBS, in front of the process and docker backends."""
