"""The operations of the API: one module per group, with a table ``ENDPOINTS`` at its end."""
