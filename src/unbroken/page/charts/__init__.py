"""Charts: data in, SVG out."""
