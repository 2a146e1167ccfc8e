"""The command `unbroken`: one file per command, imported only when it is called."""
