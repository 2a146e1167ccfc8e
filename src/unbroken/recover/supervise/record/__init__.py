"""What a supervisor writes down, and by which clocks, in which term, until which stop."""
