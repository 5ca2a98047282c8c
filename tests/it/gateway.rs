//! The data plane, from socket to socket.

mod headers;
mod stream;
