//! The operator's socket: look at the runs of a process, and change them while they are served.
//!
//! It is a unix socket of its own, open to its owner only and never mounted into a sandbox: who can
//! connect may do everything here. Each change is in the audit log of its run, with the user whose
//! process asked for it.
//!
//! Read [`routes`] first: it is the whole interface.

mod change;
mod error;
mod routes;

use std::future::Future;
use std::io;
use std::sync::Arc;

use axum::extract::connect_info::Connected;
use axum::serve::IncomingStream;
use tokio::net::UnixListener;

use crate::app::Runs;
use crate::base::unix::{self, Listener, Peer, Permissions};
use crate::config::Admin as Config;

/// The bound socket. Dropping it removes its path.
pub struct Admin {
    listener: Listener,
}

/// What the handlers work on.
struct Desk {
    runs: Runs,
    /// Reads the configuration again and puts it in force.
    reload: Box<dyn Fn() -> anyhow::Result<()> + Send + Sync>,
}

/// The user whose process is connected.
#[derive(Clone, Copy, Debug)]
struct Operator {
    uid: Option<u32>,
}

impl Admin {
    /// Binds the socket, if one is configured.
    ///
    /// # Errors
    /// The path cannot be bound, or another process serves it.
    pub fn bind(config: &Config) -> Result<Option<Self>, unix::Error> {
        let Some(path) = &config.socket_path else { return Ok(None) };
        let owner_only = Permissions { mode: 0o600, uid: None, gid: None };
        Listener::bind(path, owner_only).map(|listener| Some(Self { listener }))
    }

    /// Serves until `closing`, which lets open requests end.
    ///
    /// # Errors
    /// The socket cannot be registered with the runtime.
    pub async fn serve(
        &self,
        runs: Runs,
        reload: impl Fn() -> anyhow::Result<()> + Send + Sync + 'static,
        closing: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<()> {
        let listener = self.listener.accept_handle()?;
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        tracing::info!(socket = %self.listener.path().display(), "operators are served");
        let desk = Arc::new(Desk { runs, reload: Box::new(reload) });
        let service = routes::router(desk).into_make_service_with_connect_info::<Operator>();
        axum::serve(listener, service).with_graceful_shutdown(closing).await
    }
}

impl Connected<IncomingStream<'_, UnixListener>> for Operator {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        use std::os::fd::AsFd;
        Self { uid: Peer::of(stream.io().as_fd()).ok().map(|peer| peer.uid) }
    }
}
