"""Integrations of the penalties and the monitor with the trainers of other libraries; each module imports only its own library."""
