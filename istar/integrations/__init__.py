"""Penalties and the monitor in the trainers of other libraries; each module imports only its own library."""
