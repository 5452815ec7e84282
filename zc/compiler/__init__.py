"""Dynamo's backend, and Inductor on the segments of its graphs."""
