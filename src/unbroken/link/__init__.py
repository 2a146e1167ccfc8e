"""What crosses a connection: bounds on what comes in, ports, web addresses."""
