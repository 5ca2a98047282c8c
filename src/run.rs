//! A run's identity and the handles its calls share.
