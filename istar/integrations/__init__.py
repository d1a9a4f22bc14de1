"""Integrations of the penalties with the trainers of other libraries; each module imports only its own library."""
