//! Fake servers for the services that runs call, on real sockets. The commands `demo` and `provider` and the tests use
//! them.

pub mod github_server;
pub mod model_provider;
