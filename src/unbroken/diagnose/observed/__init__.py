"""Verdicts from what a supervisor saw itself: how processes ended, which nodes were lost, who left early."""
