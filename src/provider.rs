//! A fake model provider for the demo, the tests and the benches.
