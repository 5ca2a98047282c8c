//! The operator's socket, through which an operator inspects the runs of a process and changes them while they are
//! served.
//!
//! The socket is a unix socket of its own. Only its owner may open it, and it is never mounted into a sandbox: a
//! process that can connect may do everything here. The audit log of a run records each change with the user of the
//! process that requested the change.
//!
//! Read [`routes`] first: the module is the whole interface.

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

/// The bound socket. Dropping the socket removes its path.
pub struct AdminSocket {
    listener: UnixListenerGuard,
}

/// The state that the handlers share.
struct AdminState {
    runs: RunManager,
    /// A function that reads the configuration again and puts it in force.
    reload: Box<dyn Fn() -> anyhow::Result<()> + Send + Sync>,
}

/// The user of the connected process.
#[derive(Clone, Copy, Debug)]
struct OperatorCredentials {
    uid: Option<u32>,
}

impl AdminSocket {
    /// Binds the socket if the configuration names one.
    ///
    /// # Errors
    /// Returns an error if the path cannot be bound, or if another process serves it.
    pub fn bind_socket(config: &Config) -> Result<Option<Self>, unix::UnixListenerError> {
        let Some(path) = &config.socket_path else { return Ok(None) };
        // The permissions are the only authentication here, so they are not configurable.
        let owner_only = SocketPermissions { mode: 0o600, uid: None, gid: None };
        UnixListenerGuard::bind_socket(path, owner_only).map(|listener| Some(Self { listener }))
    }

    /// Serves requests until `closing` is ready. Requests in progress may then finish.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be registered with the runtime.
    pub async fn serve_requests(
        &self,
        runs: RunManager,
        reload: impl Fn() -> anyhow::Result<()> + Send + Sync + 'static,
        closing: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<()> {
        let listener = self.listener.accept_handle()?;
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        tracing::info!(socket = %self.listener.path().display(), "the admin socket is ready");
        let state = Arc::new(AdminState { runs, reload: Box::new(reload) });
        let service = routes::admin_router(state)
            .into_make_service_with_connect_info::<OperatorCredentials>();
        axum::serve(listener, service).with_graceful_shutdown(closing).await
    }
}

impl Connected<IncomingStream<'_, UnixListener>> for OperatorCredentials {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        use std::os::fd::AsFd;
        // The kernel reports the user. Without credentials the audit log records an action without a user.
        Self { uid: PeerCredentials::from_socket(stream.io().as_fd()).ok().map(|peer| peer.uid) }
    }
}
