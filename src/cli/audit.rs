//! `cogni-gateway audit`: verifies or prints an audit log.

use std::fmt::{self, Display, Formatter};
use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;

use crate::base::hidden_characters::is_plain;
use crate::base::regular_file::open_regular_file;
use crate::llm::budget::{BudgetAmount, ConnectionSpending, ToolSpending};
use crate::telemetry::audit::read::{
    self, AuditConnectAdmissionEvent, AuditConnectRefusalEvent, AuditConnectSettlementEvent,
    AuditConnectionEvent, AuditEntry, AuditEvent, AuditReader, AuditRefusalEvent,
    AuditSessionEvent, AuditSettlementEvent, AuditToolRefusalEvent, AuditToolSettlementEvent,
    ChainBreakError,
};
use crate::telemetry::audit::verify::{self, AuditVerifyReport, CheckpointCoverage};
use crate::telemetry::audit::{AuditError, AuditPublicKey, writer_process};

/// The subcommands of `audit`.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum AuditCommand {
    /// Prove that no record of a log was changed, or name the first record that was
    #[command(after_help = VERDICT_HELP)]
    Verify {
        /// The log, as `AUDIT_LOG_PATH` names it
        file: PathBuf,
        /// The key that must have signed the log to its last record: 32 bytes as hexadecimal or base64. Without a key
        /// only the chain is checked.
        #[arg(long, value_name = "KEY")]
        public_key: Option<String>,
    },
    /// Print a log as a table, one line per record
    Show {
        /// The log, as `AUDIT_LOG_PATH` names it
        file: PathBuf,
    },
}

/// Runs the command. The exit status is 1 if a log can be read but is not proved. The status is 3 if the pinned key has
/// signed a part of the log and the log has no end of the run.
pub fn run(command: &AuditCommand, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    match command {
        AuditCommand::Verify { file, public_key } => verify_log(file, public_key.as_deref(), out),
        AuditCommand::Show { file } => show_log(file, out),
    }
}

fn verify_log(file: &Path, pinned: Option<&str>, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let pinned =
        pinned.map(AuditPublicKey::parse_public_key).transpose().context("--public-key")?;
    // The writer is looked up first: a run that ends in between then has its end in the log.
    let writer = writer_process::find_writer(file).ok().flatten();
    match verify::verify_file(file, pinned.as_ref()) {
        // An empty log proves nothing: all of its records may have been removed.
        Ok(report) if report.records == 0 => {
            writeln!(out, "EMPTY: there is no record, so nothing is proved")?;
            Ok(ExitCode::FAILURE)
        }
        // Only a pinned key makes a signature count; a log with an end must be signed to that end.
        Ok(report) if pinned.is_some() && report.coverage() == CheckpointCoverage::UnsignedEnd => {
            writeln!(out, "UNSIGNED: {}", SignatureText(&report))?;
            writeln!(out, "nothing proves who wrote the unsigned records")?;
            Ok(ExitCode::FAILURE)
        }
        Ok(report) => {
            let code = write_verdict(&report, pinned.is_some(), out)?;
            write_report(&report, pinned.is_some(), writer, out)?;
            Ok(code)
        }
        // A broken chain and a missing signature are verdicts about the log, not errors of this command.
        Err(AuditError::ChainBroken { broken, .. }) => write_broken(&broken, out),
        Err(error @ AuditError::Unsigned { .. }) => {
            writeln!(out, "UNSIGNED: {error}")?;
            Ok(ExitCode::FAILURE)
        }
        Err(error) => Err(error.into()),
    }
}

fn show_log(file: &Path, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let log = open_regular_file(file).with_context(|| format!("audit log `{}`", file.display()))?;
    let mut reader = AuditReader::new(BufReader::new(log));
    let mut date = String::new();
    loop {
        match reader.next_entry() {
            Ok(Some(entry)) => write_row(&entry, &mut date, out)?,
            Ok(None) => return Ok(ExitCode::SUCCESS),
            // The rows before the break are printed already; the break is reported like `verify` does.
            Err(read::AuditReadError::Broken(broken)) => return write_broken(&broken, out),
            Err(read::AuditReadError::Io(error)) => {
                return Err(error).with_context(|| format!("audit log `{}`", file.display()));
            }
        }
    }
}

fn write_broken(broken: &ChainBreakError, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    writeln!(out, "BROKEN: {broken}")?;
    match broken.seq {
        // No record precedes the first one.
        1 => (),
        2 => writeln!(out, "record 1 is as it was written")?,
        seq => writeln!(out, "records 1 to {} are as they were written", seq - 1)?,
    }
    Ok(ExitCode::FAILURE)
}

/// Writes how much of the log is proved. Only the verdict on a log that is signed to its last record begins with `OK`.
fn write_verdict(
    report: &AuditVerifyReport,
    pinned: bool,
    out: &mut impl Write,
) -> io::Result<ExitCode> {
    let records = report.records;
    // Anyone who can write the file can also write a consistent chain.
    if !pinned {
        writeln!(
            out,
            "CHAIN ONLY: {records} records continue each other; without --public-key nothing proves who wrote them"
        )?;
        return Ok(ExitCode::SUCCESS);
    }
    // The run's end is present, and a checkpoint of the pinned key covers it.
    if report.coverage() == CheckpointCoverage::Complete {
        writeln!(out, "OK: {records} records are as they were written, and signed to the last")?;
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(out, "OPEN: the run's end is not the end of the log; {}", SignatureText(report))?;
    Ok(ExitCode::from(EXIT_UNFINISHED_LOG))
}

/// Writes the content of the log. `writer` is the process that writes the log at this moment.
fn write_report(
    report: &AuditVerifyReport,
    pinned: bool,
    writer: Option<u32>,
    out: &mut impl Write,
) -> io::Result<()> {
    let AuditVerifyReport { run, attempt, account, starts, first, last, .. } = report;
    let AuditVerifyReport { admitted, settled, crashed, open, unmatched, refused, spent, .. } =
        report;
    let (run, attempt, account) =
        (PrintableLogText(run), PrintableLogText(attempt), PrintableLogText(account));
    writeln!(out, "run         {run}, attempt {attempt}, account {account}, started {starts}×")?;
    writeln!(out, "time        {} to {}", PrintableLogText(first), PrintableLogText(last))?;
    writeln!(out, "calls       {admitted} admitted, {settled} settled ({crashed} after a crash)")?;
    // An admitted call without a settlement may still be running.
    if *open > 0 {
        let state = if writer.is_some() {
            "in flight"
        } else {
            "in flight, or lost if the process is gone"
        };
        writeln!(out, "            {open} {state}")?;
    }
    if *unmatched > 0 {
        writeln!(out, "            {unmatched} settled without admission: a fault of the gateway")?;
    }
    writeln!(out, "refusals    {refused}")?;
    write_tool_totals(report, out)?;
    write_connection_totals(report, out)?;
    writeln!(out, "spent       {}", AmountText(*spent))?;
    writeln!(out, "checkpoints {}", CheckpointSummary { report, pinned })?;
    match writer {
        _ if report.finished => writeln!(out, "end         in order"),
        Some(process) => {
            writeln!(out, "end         not reached: process {process} is writing this log")?;
            writeln!(
                out,
                "            settlements and refusals of the last second may not be in it yet"
            )
        }
        None => {
            writeln!(out, "end         not recorded, and no process here is writing this log:")?;
            writeln!(out, "            the process was killed, or records at the end were cut off")
        }
    }
}

/// Writes the calls of each tool, if the run has called or tried to call a tool.
fn write_tool_totals(report: &AuditVerifyReport, out: &mut impl Write) -> io::Result<()> {
    for (number, (tool, spent)) in report.tools.iter().enumerate() {
        let heading = if number == 0 { "tools" } else { "" };
        let (tool, ToolSpending { calls, cost }) = (PrintableLogText(tool), spent);
        writeln!(out, "{heading:12}{tool}: {}, ${cost}", count_calls(*calls, "call"))?;
    }
    if report.tools_crashed > 0 {
        let crashed = count_calls(report.tools_crashed, "tool call");
        writeln!(out, "            {crashed} settled after a crash")?;
    }
    if report.tool_refused > 0 {
        let refused = count_calls(report.tool_refused, "tool call");
        writeln!(out, "            {refused} refused")?;
    }
    Ok(())
}

/// Formats a number of calls for people.
fn count_calls(count: u64, call: &str) -> String {
    if count == 1 { format!("1 {call}") } else { format!("{count} {call}s") }
}

/// Writes the use of each connection, if the run has used or tried to use one.
fn write_connection_totals(report: &AuditVerifyReport, out: &mut impl Write) -> io::Result<()> {
    for (number, (name, spent)) in report.connections.iter().enumerate() {
        let heading = if number == 0 { "connections" } else { "" };
        let (name, ConnectionSpending { requests, bytes_out, bytes_in, cost }) =
            (PrintableLogText(name), spent);
        writeln!(
            out,
            "{heading:12}{name}: {requests} requests, {bytes_out} bytes out, {bytes_in} bytes in, ${cost}"
        )?;
    }
    if report.connects_crashed > 0 {
        let crashed = report.connects_crashed;
        writeln!(out, "            {crashed} requests over connections settled after a crash")?;
    }
    if report.connect_refused > 0 {
        writeln!(out, "            {} requests over connections refused", report.connect_refused)?;
    }
    if report.credentials_echoed > 0 {
        let echoed = report.credentials_echoed;
        writeln!(out, "            {echoed} answers repeated a credential and were cut")?;
    }
    Ok(())
}

/// A sentence that states which records the last valid checkpoint covers.
struct SignatureText<'a>(&'a AuditVerifyReport);

impl Display for SignatureText<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (records, signed) = (self.0.records, self.0.signed_records());
        write!(f, "records 1 to {signed} are as they were written, and signed; ")?;
        match records - signed {
            0 => f.write_str("there is none after them"),
            1 => write!(f, "1 record after them is not signed: {records}"),
            unsigned => {
                let first = signed + 1;
                write!(f, "{unsigned} records after them are not signed: {first} to {records}")
            }
        }
    }
}

/// Two lines that state the number of checkpoints, and the key that signed them.
struct CheckpointSummary<'a> {
    report: &'a AuditVerifyReport,
    pinned: bool,
}

impl Display for CheckpointSummary<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let signatures = &self.report.signatures;
        let (Some(last), Some(key)) = (signatures.last, signatures.key) else {
            return f.write_str("0, so nothing is signed yet");
        };
        let AuditVerifyReport { records, .. } = self.report;
        write!(f, "{}, the last is record {last} of {records}", signatures.checkpoints)?;
        // Checkpoints of other keys prove nothing for this key.
        if signatures.foreign > 0 {
            write!(f, "; {} more by other keys", signatures.foreign)?;
        }
        write!(f, "\nkey         {key}")?;
        // A key that only the log names was chosen by the writer of the log, who may be a forger.
        let source = if self.pinned {
            "the one you named"
        } else {
            "named by the file itself, so it finds damage, not a forger; pass --public-key"
        };
        write!(f, "\n            {source}")
    }
}

fn write_row(entry: &AuditEntry, date: &mut String, out: &mut impl Write) -> io::Result<()> {
    let (day, time) = entry.time.split_once('T').unwrap_or(("-", &entry.time));
    // A new day is printed once, as a heading of its rows.
    if day != date {
        day.clone_into(date);
        writeln!(out, "{}, run {}", PrintableLogText(day), PrintableLogText(&entry.run))?;
    }
    // Every text of a record is made printable: clients chose models, routes and ids.
    let seq = entry.seq;
    let time = PrintableLogText(time.trim_end_matches('Z')).to_string();
    let name = PrintableLogText(&entry.name).to_string();
    let request = PrintableLogText(request_id_of(&entry.event)).to_string();
    writeln!(
        out,
        "{seq:>6}  {time:12}  {name:17}  {request:36}  {}",
        EventDescription(&entry.event)
    )
}

fn request_id_of(event: &AuditEvent) -> &str {
    match event {
        AuditEvent::Admitted(admission) => &admission.request,
        AuditEvent::Settled(settlement) => &settlement.request,
        AuditEvent::Refused(AuditRefusalEvent { request: Some(request), .. }) => request,
        AuditEvent::ToolAdmitted(admission) => &admission.call,
        AuditEvent::ToolSettled(settlement) => &settlement.call,
        AuditEvent::ConnectAdmitted(admission) => &admission.request,
        AuditEvent::ConnectSettled(settlement) => &settlement.request,
        _ => "-",
    }
}

/// The last column of a row: the details of the event.
struct EventDescription<'a>(&'a AuditEvent);

impl Display for EventDescription<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.0 {
            AuditEvent::Started(session) => write_session(session, f),
            AuditEvent::Opened(connection) => write_connection(connection, f),
            AuditEvent::Admitted(admission) => {
                let route = PrintableLogText(&admission.route);
                let model = PrintableLogText(admission.model.as_deref().unwrap_or("-"));
                let stream = if admission.stream { ", streamed" } else { "" };
                let reserved = AmountText(admission.reserved);
                write!(f, "{route} {model}{stream}; reserves {reserved}")
            }
            AuditEvent::Settled(settlement) => write_settlement(settlement, f),
            AuditEvent::Refused(refusal) => write_refusal(refusal, f),
            AuditEvent::ToolAdmitted(admission) => {
                let tool = PrintableLogText(&admission.tool);
                write!(f, "{tool}; reserves ${}", admission.reserved.cost)
            }
            AuditEvent::ToolSettled(settlement) => write_tool_settlement(settlement, f),
            AuditEvent::ToolRefused(refusal) => write_tool_refusal(refusal, f),
            AuditEvent::ConnectAdmitted(admission) => write_connect_admission(admission, f),
            AuditEvent::ConnectSettled(settlement) => write_connect_settlement(settlement, f),
            AuditEvent::ConnectRefused(refusal) => write_connect_refusal(refusal, f),
            AuditEvent::Finished(finished) => write!(f, "spent {}", AmountText(finished.spent)),
            AuditEvent::Checkpoint(checkpoint) => {
                write!(f, "by {}", PrintableLogText(&checkpoint.public_key))
            }
            AuditEvent::Repaired(repair) => {
                let kept_in = PrintableLogText(&repair.kept_in);
                write!(f, "{} bytes of a torn line moved to {kept_in}", repair.torn_bytes)
            }
            AuditEvent::Other => f.write_str("-"),
        }
    }
}

fn write_session(session: &AuditSessionEvent, f: &mut Formatter<'_>) -> fmt::Result {
    let (attempt, account) =
        (PrintableLogText(&session.attempt), PrintableLogText(&session.account));
    let (version, policy) = (PrintableLogText(&session.version), PrintableLogText(&session.policy));
    let resumed = if session.resumed { ", resumed" } else { "" };
    write!(f, "attempt {attempt}{resumed}, account {account}, version {version}, policy {policy}")
}

fn write_connection(connection: &AuditConnectionEvent, f: &mut Formatter<'_>) -> fmt::Result {
    let AuditConnectionEvent { pid, uid: Some(uid), gid: Some(gid), cgroup, .. } = connection
    else {
        // Without a uid the event only counts further connections.
        return write!(f, "{} more, of further processes", connection.repeats);
    };
    write!(f, "uid {uid}, gid {gid}")?;
    match pid {
        Some(pid) => write!(f, ", pid {pid}")?,
        // The kernel reports no pid for a process outside this pid namespace.
        None => f.write_str(", in another namespace")?,
    }
    cgroup.as_ref().map_or(Ok(()), |cgroup| write!(f, ", in {}", PrintableLogText(cgroup)))
}

fn write_settlement(settlement: &AuditSettlementEvent, f: &mut Formatter<'_>) -> fmt::Result {
    f.write_str(settlement.outcome.as_str())?;
    if settlement.status > 0 {
        write!(f, " {}", settlement.status)?;
    }
    if let Some(code) = &settlement.code {
        write!(f, " {}", PrintableLogText(code))?;
    }
    let charged = AmountText(settlement.charged);
    let source = settlement.usage.source.as_str();
    write!(f, "; charged {charged} ({source}); {:.1} ms", settlement.duration_ms)
}

fn write_tool_settlement(
    settlement: &AuditToolSettlementEvent,
    f: &mut Formatter<'_>,
) -> fmt::Result {
    let tool = PrintableLogText(&settlement.tool);
    write!(f, "{tool} {}", settlement.outcome.as_str())?;
    if let Some(code) = &settlement.code {
        write!(f, " {}", PrintableLogText(code))?;
    }
    let AuditToolSettlementEvent { result_bytes, duration_ms, .. } = settlement;
    let charged = settlement.charged.cost;
    write!(f, "; charged ${charged}; {result_bytes} bytes, {duration_ms} ms")
}

fn write_tool_refusal(refusal: &AuditToolRefusalEvent, f: &mut Formatter<'_>) -> fmt::Result {
    write!(f, "{} {}", PrintableLogText(&refusal.code), refusal.status)?;
    if let Some(tool) = &refusal.tool {
        write!(f, "; {}", PrintableLogText(tool))?;
    }
    if let (Some(layer), Some(rule)) = (&refusal.layer, &refusal.rule) {
        write!(f, ", layer {}, rule {}", PrintableLogText(layer), PrintableLogText(rule))?;
    }
    if refusal.repeats > 1 {
        write!(f, "; {} times", refusal.repeats)?;
    }
    Ok(())
}

fn write_connect_admission(
    admission: &AuditConnectAdmissionEvent,
    f: &mut Formatter<'_>,
) -> fmt::Result {
    let (connection, method) =
        (PrintableLogText(&admission.connection), PrintableLogText(&admission.method));
    let (rule, reserved) = (PrintableLogText(&admission.rule), admission.reserved.cost);
    write!(f, "{connection} {method} by {rule}; reserves ${reserved}")
}

fn write_connect_settlement(
    settlement: &AuditConnectSettlementEvent,
    f: &mut Formatter<'_>,
) -> fmt::Result {
    let AuditConnectSettlementEvent { bytes_out, bytes_in, duration_ms, status, .. } = settlement;
    let (connection, outcome) =
        (PrintableLogText(&settlement.connection), settlement.outcome.as_str());
    let charged = settlement.charged.cost;
    write!(
        f,
        "{connection} {outcome} {status}; charged ${charged}; {bytes_out} bytes out, {bytes_in} bytes in, {duration_ms} ms"
    )
}

fn write_connect_refusal(refusal: &AuditConnectRefusalEvent, f: &mut Formatter<'_>) -> fmt::Result {
    write!(f, "{} {}", PrintableLogText(&refusal.code), refusal.status)?;
    if let Some(connection) = &refusal.connection {
        write!(f, "; {}", PrintableLogText(connection))?;
    }
    if let (Some(layer), Some(rule)) = (&refusal.layer, &refusal.rule) {
        write!(f, ", layer {}, rule {}", PrintableLogText(layer), PrintableLogText(rule))?;
    }
    if refusal.repeats > 1 {
        write!(f, "; {} times", refusal.repeats)?;
    }
    Ok(())
}

fn write_refusal(refusal: &AuditRefusalEvent, f: &mut Formatter<'_>) -> fmt::Result {
    write!(f, "{} {}", PrintableLogText(&refusal.code), refusal.status)?;
    if let Some(route) = refusal.route.as_deref().filter(|route| *route != "-") {
        write!(
            f,
            "; {} {}",
            PrintableLogText(route),
            PrintableLogText(refusal.model.as_deref().unwrap_or("-"))
        )?;
    }
    // One record may stand for several equal refusals.
    if refusal.repeats > 1 {
        write!(f, "; {} times", refusal.repeats)?;
    }
    Ok(())
}

/// A number of turns, tokens and dollars, formatted for people.
struct AmountText(BudgetAmount);

impl Display for AmountText {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let BudgetAmount { turns, input, output, cost } = self.0;
        let plural = if turns == 1 { "" } else { "s" };
        write!(f, "{turns} turn{plural}, {} in, {} out", input.0, output.0)?;
        // Without prices every cost is zero, and is not shown.
        if cost.is_zero() { Ok(()) } else { write!(f, ", ${cost}") }
    }
}

/// Text from a log, made safe to print: a client chose some of it, and a terminal obeys escapes.
struct PrintableLogText<'a>(&'a str);

impl Display for PrintableLogText<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            c if !is_plain(c) => write!(f, "{}", c.escape_unicode()),
            c => write!(f, "{c}"),
        })
    }
}

/// The exit status of a log without the end of the run.
const EXIT_UNFINISHED_LOG: u8 = 3;

const VERDICT_HELP: &str = "\
The first word of the output is the verdict:
  OK          the given key has signed every record, the run's end included (exit status 0)
  CHAIN ONLY  no key was given: the records continue each other, but any process may have written them (0)
  OPEN        the run's end is not the end of the log; the output says which records are signed (3)
  UNSIGNED    the run's end, or the whole log, is not signed with the key: any process may have written it (1)
  BROKEN      a record is not what was written; EMPTY: there is no record (1)";
