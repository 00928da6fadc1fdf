"""Names, paths and formats that both halves use; the only part of jobentry that cloudjob imports.

Each format has its writer and its reader here. Start with ``env.py`` and ``paths.py``.
"""
