//! The operator's socket: look at the runs of a process, and change them while they are served.
//!
//! It is a unix socket of its own, open to its owner only and never mounted into a sandbox: who can
//! connect may do everything here. Each change is in the audit log of its run, with the user whose
//! process asked for it.
//!
//! Read [`routes`] first: it is the whole interface.

mod error;
mod patch;
mod routes;

use std::future::Future;
use std::io;
use std::sync::Arc;

use axum::extract::connect_info::Connected;
use axum::serve::IncomingStream;
use tokio::net::UnixListener;

use crate::base::unix::{self, PeerCredentials, SocketPermissions, UnixListenerGuard};
use crate::gateway::config::AdminConfig as Config;
use crate::gateway::process::RunManager;

/// The bound socket. Dropping it removes its path.
pub struct AdminSocket {
    listener: UnixListenerGuard,
}

/// What the handlers work on.
struct AdminState {
    runs: RunManager,
    /// Reads the configuration again and puts it in force.
    reload: Box<dyn Fn() -> anyhow::Result<()> + Send + Sync>,
}

/// The user whose process is connected.
#[derive(Clone, Copy, Debug)]
struct OperatorCredentials {
    uid: Option<u32>,
}

impl AdminSocket {
    /// Binds the socket, if one is configured.
    ///
    /// # Errors
    /// The path cannot be bound, or another process serves it.
    pub fn bind_socket(config: &Config) -> Result<Option<Self>, unix::UnixListenerError> {
        let Some(path) = &config.socket_path else { return Ok(None) };
        let owner_only = SocketPermissions { mode: 0o600, uid: None, gid: None };
        UnixListenerGuard::bind_socket(path, owner_only).map(|listener| Some(Self { listener }))
    }

    /// Serves until `closing`, which lets open requests end.
    ///
    /// # Errors
    /// The socket cannot be registered with the runtime.
    pub async fn serve_requests(
        &self,
        runs: RunManager,
        reload: impl Fn() -> anyhow::Result<()> + Send + Sync + 'static,
        closing: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<()> {
        let listener = self.listener.accept_handle()?;
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        tracing::info!(socket = %self.listener.path().display(), "operators are served");
        let desk = Arc::new(AdminState { runs, reload: Box::new(reload) });
        let service =
            routes::admin_router(desk).into_make_service_with_connect_info::<OperatorCredentials>();
        axum::serve(listener, service).with_graceful_shutdown(closing).await
    }
}

impl Connected<IncomingStream<'_, UnixListener>> for OperatorCredentials {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        use std::os::fd::AsFd;
        Self { uid: PeerCredentials::from_socket(stream.io().as_fd()).ok().map(|peer| peer.uid) }
    }
}
