"""The local machine: ``doctor.py`` checks what jobs need, ``images.py`` builds images."""
