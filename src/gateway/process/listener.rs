//! The listener of a process: one run's socket, or an address that many runs share.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use anyhow::{Context, bail};
use arc_swap::ArcSwap;
use tokio::sync::Semaphore;

use super::run_manager::RunManager;
use crate::base::task_group::TaskGroup;
use crate::base::tls;
use crate::base::unix::UnixListenerGuard;
use crate::gateway::config::{GatewayConfig, SharedListenerConfig};
use crate::gateway::pipeline::registry::PerWorkerGateways;
use crate::gateway::pipeline::run_token_auth::RunTokenAuth;
use crate::gateway::pipeline::server::{self, run_socket};

/// A bound listener and the parts that serve its connections.
pub(super) enum GatewayListener {
    Socket {
        listener: UnixListenerGuard,
        run: PerWorkerGateways,
        config: Arc<server::HttpServerConfig>,
        uids: Arc<[u32]>,
    },
    Shared {
        listener: TcpListener,
        config: SharedListenerConfig,
        shared: Arc<server::shared_listener::SharedListener>,
    },
}

/// The serving loop of one worker.
pub(super) type WorkerFuture = Pin<Box<dyn Future<Output = io::Result<()>> + Send>>;

impl GatewayListener {
    /// Binds the listener that the configuration names, and opens the configured runs.
    pub(super) fn bind_listener(
        config: &GatewayConfig,
        runs: &RunManager,
        tasks: &TaskGroup,
    ) -> anyhow::Result<Self> {
        match &config.shared {
            None => Self::bind_socket(config, runs),
            Some(shared) => Self::bind_shared(config, shared, runs, tasks),
        }
    }

    fn bind_socket(config: &GatewayConfig, runs: &RunManager) -> anyhow::Result<Self> {
        // The socket comes first. If another process serves the socket, this process must not touch that process's
        // records.
        let listener = UnixListenerGuard::bind_socket(
            &config.listen.socket_path,
            config.listen.socket_permissions(),
        )?;
        let run = runs.open_single()?;
        let uids = config.listen.require_uid.as_slice().into();
        Ok(Self::Socket { listener, run, config: Arc::new(config.server.clone()), uids })
    }

    fn bind_shared(
        config: &GatewayConfig,
        shared: &SharedListenerConfig,
        runs: &RunManager,
        tasks: &TaskGroup,
    ) -> anyhow::Result<Self> {
        // Certificates and keys are read before the listener is bound and a run is opened, so a bad file leaves no
        // trace.
        let tls = shared.tls_files().map(|files| tls::server_config(&files)).transpose()?;
        let auth = RunTokenAuth {
            keys: ArcSwap::from_pointee(shared.token_keys()?),
            runs: Arc::clone(runs.registry()),
            metrics: Arc::clone(runs.metrics()),
            access_log: runs.access_log_handle().clone(),
            tasks: tasks.clone(),
        };
        let listener = bind_tcp(shared.listen).with_context(|| {
            format!("`shared.listen` is `{}`, which cannot be bound", shared.listen)
        })?;
        // The runs are opened before the first connection is accepted, so their tokens are valid from the start.
        for spec in &shared.runs {
            let opened = runs.open_run(spec.clone());
            opened.with_context(|| format!("run `{}` cannot be opened", spec.run_id))?;
        }
        let served = server::shared_listener::SharedListener {
            config: config.server.clone(),
            auth,
            tls: tls.map(ArcSwap::new),
            max_connections: shared.max_connections,
            handshake_timeout: shared.handshake_timeout,
            tasks: tasks.clone(),
            streams: Arc::new(Semaphore::new(server::MAX_SHARED_STREAMS)),
        };
        Ok(Self::Shared { listener, config: shared.clone(), shared: Arc::new(served) })
    }

    /// Returns the serving loop of one worker.
    pub(super) fn worker_future(&self, worker: usize) -> io::Result<WorkerFuture> {
        Ok(match self {
            Self::Socket { listener, run, config, uids } => {
                // Each worker has a gateway of its own for the run, and its own handle on the shared socket.
                let (run, config) = (Arc::clone(&run[worker]), Arc::clone(config));
                Box::pin(run_socket::serve_run_socket(
                    listener.accept_handle()?,
                    run,
                    config,
                    Arc::clone(uids),
                ))
            }
            Self::Shared { listener, shared, .. } => {
                // The clones share one queue of connections in the kernel, which spreads connections over the workers.
                let (listener, shared) = (listener.try_clone()?, Arc::clone(shared));
                Box::pin(server::shared_listener::serve_shared_listener(listener, worker, shared))
            }
        })
    }

    /// Returns a function that reads keys and certificates again. Its result is a second function that puts them in
    /// force.
    pub(super) fn tls_reloader(
        &self,
    ) -> impl Fn(&GatewayConfig) -> anyhow::Result<Box<dyn FnOnce()>> + use<> {
        let current = match self {
            Self::Socket { .. } => None,
            Self::Shared { shared, config, .. } => Some((Arc::clone(shared), config.clone())),
        };
        move |new_config| {
            // A run's own socket has neither keys nor certificates, so there is nothing to reload.
            let (Some((current, old)), Some(shared)) = (current.clone(), &new_config.shared) else {
                return Ok(Box::new(|| ()));
            };
            check_listener_unchanged(&old, shared)?;
            let keys = shared.token_keys()?;
            let tls = shared.tls_files().map(|files| tls::server_config(&files)).transpose()?;
            // The values are complete and checked at this point, so putting them in force cannot fail half-way.
            Ok(Box::new(move || {
                current.auth.keys.store(Arc::new(keys));
                if let (Some(current), Some(tls)) = (&current.tls, tls) {
                    current.store(tls);
                }
            }))
        }
    }

    pub(super) fn socket_path(&self) -> Option<&Path> {
        match self {
            Self::Socket { listener, .. } => Some(listener.path()),
            Self::Shared { .. } => None,
        }
    }

    pub(super) fn listen_address(&self) -> Option<SocketAddr> {
        match self {
            Self::Socket { .. } => None,
            Self::Shared { listener, .. } => listener.local_addr().ok(),
        }
    }
}

/// Checks that a configuration changes only keys and certificates. The listener itself is bound and cannot change.
fn check_listener_unchanged(
    old: &SharedListenerConfig,
    new: &SharedListenerConfig,
) -> anyhow::Result<()> {
    let changed = [
        ("`shared.listen`", old.listen != new.listen),
        ("`shared.plaintext`", old.plaintext != new.plaintext),
        ("`shared.handshake_timeout`", old.handshake_timeout != new.handshake_timeout),
        ("`shared.max_connections`", old.max_connections != new.max_connections),
        ("`shared.audit_dir`", old.audit_dir != new.audit_dir),
    ];
    match changed.into_iter().find(|(_, has_changed)| *has_changed) {
        Some((setting, _)) => {
            bail!("{setting} cannot change while runs are served; restart for that")
        }
        None => Ok(()),
    }
}

/// Binds a TCP listener that does not block. The address can be bound again at once after the process has ended.
pub(super) fn bind_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
