"""The conformance suite for backends. Lazy: importing this imports neither torch nor pydantic."""
