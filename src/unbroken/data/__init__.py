"""Where a training stands in its data: one owner of the position, exact at any world size. See docs/data.md."""
