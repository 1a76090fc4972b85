"""The dock's rules, on ids and metadata only: what is admitted, ready, leased, done, forgotten. No bytes, no wait."""
