"""The penalty in other libraries' trainers; each module imports its library when it is imported."""
