"""The REST interface: OpenAI's paths and JSON in front of the gateway."""
