"""Notifications of jobs and sweeps: ``message`` says what, ``start`` starts ``process``."""
