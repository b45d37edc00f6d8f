"""Measurements of Paceline beside what else there is; see README.md."""
