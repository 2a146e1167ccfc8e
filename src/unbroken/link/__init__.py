"""What crosses a connection: bounds on what comes in, ports, web addresses, endpoints of language models."""
