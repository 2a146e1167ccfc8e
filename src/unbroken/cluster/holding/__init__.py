"""How the processes of a run are held on a machine, so that none of them escapes."""
