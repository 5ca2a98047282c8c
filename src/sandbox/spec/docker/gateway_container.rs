//! The container that serves a run's gateway beside its sandbox, in the words of Docker Engine.
//!
//! **Invariant:** no secret stands in it, whose every word `docker inspect` shows: secrets are files.

use std::collections::BTreeMap;
use std::path::PathBuf;

use bollard::models::{
    ContainerCreateBody, HostConfig, HostConfigLogConfig, RestartPolicy, RestartPolicyNameEnum,
};

use super::{bind_body, body_digest, owner_labels};
use crate::sandbox::spec::{BindMount, MountAccess, OwnerLabels, SOCKET_DIR_TARGET};

/// What is asked of it. It has a network and the upstream's key; the sandbox has neither, but the socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayContainerSpec {
    pub run: String,
    /// By name or id.
    pub image: String,
    /// A network of the engine's, `bridge` or `host`.
    pub network: String,
    /// Who it runs as: whoever owns what is mounted.
    pub uid: u32,
    pub gid: u32,
    pub env: BTreeMap<String, String>,
    /// The directory of the run's socket on this machine. It is made in there, so that can be written.
    pub socket_dir: PathBuf,
    pub mounts: Vec<BindMount>,
}

/// What Docker Engine is asked to create, of an image that it has.
pub fn container_body(
    proxy: &GatewayContainerSpec,
    image: &str,
    stamp: &OwnerLabels,
) -> ContainerCreateBody {
    let mut body = ContainerCreateBody {
        image: Some(image.to_owned()),
        cmd: Some(vec!["proxy".to_owned()]),
        env: Some(proxy.env.iter().map(|(name, value)| format!("{name}={value}")).collect()),
        user: Some(format!("{}:{}", proxy.uid, proxy.gid)),
        stop_signal: Some("SIGTERM".to_owned()),
        host_config: Some(host_config(proxy)),
        ..ContainerCreateBody::default()
    };
    let digest = body_digest(&body);
    body.labels = Some(owner_labels(&proxy.run, stamp, digest));
    body
}

fn host_config(proxy: &GatewayContainerSpec) -> HostConfig {
    let socket = BindMount {
        source: proxy.socket_dir.clone(),
        target: SOCKET_DIR_TARGET.into(),
        access: MountAccess::ReadWrite,
    };
    HostConfig {
        network_mode: Some(proxy.network.clone()),
        cap_drop: Some(vec!["ALL".to_owned()]),
        security_opt: Some(vec!["no-new-privileges".to_owned()]),
        privileged: Some(false),
        readonly_rootfs: Some(true),
        mounts: Some(std::iter::once(&socket).chain(&proxy.mounts).map(bind_body).collect()),
        pids_limit: Some(MAX_PIDS),
        memory: Some(MAX_MEMORY_BYTES),
        memory_swap: Some(MAX_MEMORY_BYTES),
        // What it says is read when it ends before its time, and is gone with it.
        log_config: Some(HostConfigLogConfig {
            typ: Some("json-file".to_owned()),
            config: Some([("max-size".to_owned(), "1m".to_owned())].into()),
        }),
        restart_policy: Some(RestartPolicy {
            name: Some(RestartPolicyNameEnum::NO),
            maximum_retry_count: None,
        }),
        auto_remove: Some(false),
        ..HostConfig::default()
    }
}

/// As `docker/compose.yaml` has them.
const MAX_PIDS: i64 = 64;
const MAX_MEMORY_BYTES: i64 = 128 << 20;
