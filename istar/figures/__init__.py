"""Figures: what they show, as numbers, and how it is drawn. Used by the instrument and by the reports."""
