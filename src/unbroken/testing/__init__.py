"""The fakes and fault injectors that we ship: for our own tests, for the demo, and for our users' tests."""
