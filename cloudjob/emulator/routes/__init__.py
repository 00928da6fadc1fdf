"""The operations of the API: one module a group, each with its table ``ENDPOINTS`` at its end."""
