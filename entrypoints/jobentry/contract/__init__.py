"""Names, paths and formats that both halves use; cloudjob imports only this and ``system.trees``.

Each format has its writer and its reader here. Start with ``env.py`` and ``paths.py``.
"""
