"""What a plan means, costs and holds, reckoned without a GPU and without torch."""
