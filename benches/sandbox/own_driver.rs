//! The gateway's own sandboxes, made in this process as a server makes them.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::thread;
use std::time::{Duration, Instant};

use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::runner::warm_pool::{WarmPool, WarmPoolConfig};
use cogni_gateway::runner::{GatewayServer, PreparedRun, RunInputs, RunPlan, RunResult};
use cogni_gateway::sandbox::docker::DockerEngine;
use cogni_gateway::sandbox::embedded::EmbeddedDriverConfig;
use cogni_gateway::sandbox::spec::{RootSource, SandboxLimits, SandboxTask, WorkspaceMount};
use cogni_gateway::sandbox::{SandboxDriver, SandboxSpec, UserRange};
use cogni_gateway::telemetry::access_log::AccessLogDestination;
use futures_util::stream::{self, StreamExt};
use tokio::io::AsyncWrite;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::RunTimes;
use super::other_runtimes::{IMAGE, PROGRAM};

/// A driver, and the root of its sandboxes.
#[derive(Clone)]
pub(super) struct DriverKind {
    driver: SandboxDriver,
    root: RootSource,
}

pub(super) struct OwnDriver {
    order: RunPlan,
    warm: Option<WarmSlots>,
}

struct WarmSlots {
    pool: Arc<WarmPool>,
    stop: CancellationToken,
    keeping: JoinHandle<()>,
}

pub(super) fn embedded_driver() -> DriverKind {
    let program = env!("CARGO_BIN_EXE_cogni-gateway").into();
    let settings = EmbeddedDriverConfig { program, may_be_unlimited: true };
    DriverKind { driver: SandboxDriver::Embedded(settings), root: RootSource::Host }
}

pub(super) fn docker_driver() -> Result<DriverKind, String> {
    let socket = PathBuf::from(DOCKER_SOCKET);
    let image = Handle::current()
        .block_on(async { DockerEngine::connect(&socket).await?.image_id(IMAGE).await });
    image.map_err(|error| error.to_string())?;
    Ok(DriverKind {
        driver: SandboxDriver::Docker { socket },
        root: RootSource::Image(IMAGE.to_owned()),
    })
}

impl OwnDriver {
    pub(super) fn new(DriverKind { driver, root }: DriverKind, path: &Path, is_warm: bool) -> Self {
        let mut config = GatewayConfig::default();
        "acct-bench".clone_into(&mut config.identity.account);
        config.upstream.url = "127.0.0.1:9".parse().unwrap();
        config.access_log = AccessLogDestination::Off;
        let spec = SandboxSpec {
            run: String::new(),
            root,
            argv: PROGRAM.map(str::to_owned).into(),
            uid: 1001,
            env: [].into(),
            limits: SandboxLimits::default(),
            grace: GRACE,
            workspace: WorkspaceMount::None,
            mounts: vec![],
            volumes: vec![],
            socket_dir: PathBuf::new(),
            init: Some(concat!(env!("OUT_DIR"), "/cogni-init").into()),
            has_tunnels: false,
            task: SandboxTask::Agent,
        };
        let run_dir = path.join("r");
        let order = RunPlan {
            config,
            gateway: GatewayServer::OwnProcess,
            spec,
            agent: None,
            branch: None,
            roots: vec![],
            run_dir,
            uids: UserRange::DEFAULT_RANGE,
            driver,
            docker_socket: DOCKER_SOCKET.into(),
        };
        let warm = is_warm.then(|| WarmSlots::keep(&order));
        Self { order, warm }
    }

    pub(super) fn is_warm(&self) -> bool {
        self.warm.is_some()
    }

    /// A slot is ready before the clock starts.
    pub(super) fn run_once(&self) -> RunTimes {
        if let Some(warm) = &self.warm {
            warm.until_ready();
        }
        Handle::current().block_on(self.run())
    }

    pub(super) fn run_many(&self, parallel: usize, runs: usize) {
        let all = stream::iter(0..runs).map(|_| self.run()).buffer_unordered(parallel);
        Handle::current().block_on(all.for_each(|_| async {}));
    }

    pub(super) fn end_pool(self) {
        if let Some(WarmSlots { stop, keeping, .. }) = self.warm {
            stop.cancel();
            Handle::current().block_on(keeping).unwrap();
        }
    }

    pub(super) fn until_ready(&self) {
        if let Some(warm) = &self.warm {
            warm.until_ready();
        }
    }

    async fn run(&self) -> RunTimes {
        static RUN: AtomicUsize = AtomicUsize::new(0);
        let mut order = self.order.clone();
        order.config.identity.run = format!("bench-{}", RUN.fetch_add(1, Ordering::Relaxed));
        let begun = Instant::now();
        let prepared = match &self.warm {
            Some(warm) => warm.pool.claim(order, RunInputs::default()).unwrap(),
            None => PreparedRun::new(order, RunInputs::default()).unwrap(),
        };
        let mut first = FirstByte(None);
        let result = Box::pin(prepared.run(CancellationToken::new(), &mut first)).await;
        let whole = begun.elapsed();
        check_result(&result);
        RunTimes { first: first.0.unwrap() - begun, whole }
    }
}

fn check_result(result: &RunResult) {
    assert_eq!((result.ok, &*result.stdout), (true, "up\n"), "{result:?}");
}

impl WarmSlots {
    fn keep(order: &RunPlan) -> Self {
        let stock = WarmPoolConfig { count: 1, max_age: Duration::from_hours(1) };
        let (pool, stop) =
            (Arc::new(WarmPool::new(order, stock).unwrap()), CancellationToken::new());
        let keeping = tokio::spawn({
            let (pool, stop) = (Arc::clone(&pool), stop.clone());
            async move { pool.maintain(stop).await }
        });
        Self { pool, stop, keeping }
    }

    fn until_ready(&self) {
        while self.pool.ready_count() == 0 {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The time at which the first byte has arrived.
struct FirstByte(Option<Instant>);

impl AsyncWrite for FirstByte {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.get_or_insert_with(Instant::now);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

const DOCKER_SOCKET: &str = "/var/run/docker.sock";

const GRACE: Duration = Duration::from_secs(1);
