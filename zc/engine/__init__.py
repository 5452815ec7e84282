"""Runs schedules over memory and streams: the path of a gradient."""
