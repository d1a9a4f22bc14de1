"""Pages, figures and tables of the measures of points, of one model or several, or of a training."""
