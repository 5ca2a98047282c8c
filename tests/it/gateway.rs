//! The data plane, from socket to socket.

mod budget;
mod cost;
mod faults;
mod headers;
mod leaving;
mod pool;
mod record;
mod routes;
mod smuggling;
mod stream;
mod tls;
mod upstream;
