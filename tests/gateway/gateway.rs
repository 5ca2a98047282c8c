//! The data plane, from socket to socket.

mod allocations;
mod budget;
mod cost;
mod cutoff;
mod faults;
mod fields;
mod headers;
mod leaving;
mod load;
mod money;
mod name;
mod panic;
mod pool;
mod record;
mod routes;
pub(crate) mod smuggling;
mod stream;
mod tls;
mod upstream;
