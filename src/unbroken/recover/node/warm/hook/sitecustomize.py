"""Imported by the `site` of a rank's interpreter, before its script: see `../startup.py`, which it runs without a trace."""


def _run() -> None:
    import sys

    folder = __file__.rpartition("/")[0]
    path = folder.rpartition("/")[0] + "/startup.py"
    importer = vars(sys.modules["_frozen_importlib_external"])
    loader = importer["SourceFileLoader"]("unbroken_startup", path)
    names: dict = {"__name__": "unbroken_startup", "__file__": path, "__builtins__": __builtins__}
    exec(loader.get_code("unbroken_startup"), names)  # its own file, without an entry in sys.modules
    names["main"](folder)


_run()
