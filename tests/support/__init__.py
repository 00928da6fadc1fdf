"""What the tests share: servers, fakes, fault proxies and helpers that drive jobs."""
