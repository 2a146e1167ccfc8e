"""`python -m unbroken` is the command `unbroken`."""

from .cli.main import main

if __name__ == "__main__":
    main()
