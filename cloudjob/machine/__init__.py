"""The local machine: ``doctor`` and ``image_checks`` check it, and ``images`` builds images."""
