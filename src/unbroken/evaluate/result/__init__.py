"""What an evaluation leaves: its folder, journal, answers, scores, page."""
