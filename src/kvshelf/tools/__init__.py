"""The work behind the command line: copying, seeding, lists of prompts."""
