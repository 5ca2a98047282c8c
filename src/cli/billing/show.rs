//! Output of the billing records, as text or as JSON.

use std::fmt::{self, Display, Formatter};
use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;

use crate::base::timestamp;
use crate::service::billing::litellm::SpendLogSource;
use crate::service::billing::reconcile::{CallDifference, ReconcileReport, UnmatchedCall};
use crate::service::billing::store::{BillingTotals, DayBill};
use crate::service::billing::{BillFlag, ChargeReceipt, RunBill};

/// The output format.
#[derive(Clone, Copy, Debug)]
pub struct BillingOutputFormat {
    pub json: bool,
}

impl BillingOutputFormat {
    pub fn write_status(
        self,
        totals: &BillingTotals,
        flagged: &[RunBill],
        out: &mut impl Write,
    ) -> io::Result<()> {
        #[derive(Serialize)]
        struct BillingStatusView<'a> {
            #[serde(flatten)]
            totals: &'a BillingTotals,
            flagged: &'a [RunBill],
        }
        if self.json {
            return write_json_line(&BillingStatusView { totals, flagged }, out);
        }
        let BillingTotals { calls, receipts, pending_calls, waiting_notices, .. } = totals;
        writeln!(out, "calls     {calls}, {receipts} receipts, {pending_calls} still waited for")?;
        if *waiting_notices > 0 {
            writeln!(
                out,
                "waiting   {waiting_notices} calls that LiteLLM has reported and no audit log has"
            )?;
        }
        if totals.deleted_calls > 0 {
            let deleted = totals.deleted_calls;
            writeln!(out, "deleted   {deleted} more calls; `billing days` has their sums")?;
        }
        if flagged.is_empty() {
            return writeln!(out, "nothing is flagged");
        }
        for bill in flagged {
            writeln!(out, "{}", FlaggedRunText(bill))?;
        }
        Ok(())
    }

    pub fn write_receipts(
        self,
        receipts: &[ChargeReceipt],
        bill: &RunBill,
        out: &mut impl Write,
    ) -> io::Result<()> {
        if self.json {
            receipts.iter().try_for_each(|receipt| write_json_line(receipt, out))?;
            return write_json_line(bill, out);
        }
        for receipt in receipts {
            let ChargeReceipt { source_reference, amount, input, output, source, .. } = receipt;
            let model = receipt.model.as_deref().unwrap_or("-");
            let (input, output, source) = (input.0, output.0, source.as_str());
            writeln!(
                out,
                "{source_reference}  {model}  {input} in, {output} out  ${amount}  {source}"
            )?;
        }
        let RunBill { account, billable, receipts, amount, state, .. } = bill;
        let state = state.as_str();
        writeln!(
            out,
            "account {account}: ${amount}, {receipts} receipts for {billable} billable calls, {state}"
        )?;
        if bill.flags.is_empty() { Ok(()) } else { writeln!(out, "{}", FlaggedRunText(bill)) }
    }

    pub fn write_days(self, days: &[DayBill], out: &mut impl Write) -> io::Result<()> {
        if self.json {
            return days.iter().try_for_each(|day| write_json_line(day, out));
        }
        for bill in days {
            let day = timestamp::format_rfc3339_seconds(bill.day).to_string();
            let (day, _) = day.split_at(DATE_LENGTH);
            let DayBill { calls, billable, receipts, amount, input, output, .. } = bill;
            let (account, input, output) = (PrintableBillText(&bill.account), input.0, output.0);
            write!(
                out,
                "{day}  {account}  ${amount}, {receipts} receipts for {billable} billable calls of {calls}; \
                 {input} in, {output} out"
            )?;
            let counts = [
                ("unreceipted", bill.unreceipted),
                ("unpriced", bill.unpriced),
                ("conflicting", bill.conflicting),
                ("deleted", bill.deleted_calls),
            ];
            // Only counts that need attention are printed.
            for (name, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
                write!(out, "; {count} {name}")?;
            }
            writeln!(out)?;
        }
        Ok(())
    }

    pub fn write_report(
        self,
        report: &ReconcileReport,
        bound: Duration,
        out: &mut impl Write,
    ) -> io::Result<()> {
        if self.json {
            return write_json_line(report, out);
        }
        let [since, until] = [report.since, report.until].map(timestamp::format_rfc3339_seconds);
        let way = match report.way {
            SpendLogSource::Pages => "/spend/logs/v2",
            SpendLogSource::Days => "/spend/logs",
        };
        writeln!(out, "calls begun from {since} to {until}, by LiteLLM's {way}")?;
        if report.deleted_before.is_some() {
            writeln!(out, "deleted      calls begun before {since}, which are not compared")?;
        }
        let ReconcileReport { matched, charged, receipts_written, pending, .. } = report;
        writeln!(
            out,
            "matched      {matched}, charged ${charged}; {receipts_written} receipts written"
        )?;
        writeln!(
            out,
            "pending      {pending}, ended less than {} ago",
            humantime::format_duration(bound)
        )?;
        write_items("missing", "of ours, which LiteLLM does not know", &report.missing, out)?;
        write_items("unknown", "of LiteLLM's, which name runs of ours", &report.unknown, out)?;
        write_items("conflicting", "with another price than before", &report.conflicting, out)?;
        let ReconcileReport { delta_input, delta_output, delta_cost_nanodollars, .. } = report;
        writeln!(
            out,
            "delta        {delta_input:+} in, {delta_output:+} out, {}",
            SignedDollars(*delta_cost_nanodollars)
        )?;
        report
            .different
            .iter()
            .try_for_each(|one| writeln!(out, "    {}", CallDifferenceText(one)))?;
        // Without a price, the billing records have no cost to compare with LiteLLM's.
        if report.uncompared > 0 {
            writeln!(out, "uncompared   {}, for whose models we have no price", report.uncompared)?;
        }
        if report.invalid > 0 {
            writeln!(out, "invalid      {} of LiteLLM's rows cannot be used", report.invalid)?;
        }
        if report.is_partial {
            writeln!(
                out,
                "partial      LiteLLM returns at most 10000 rows of a day: missing calls may exist there"
            )?;
        }
        Ok(())
    }
}

fn write_items(
    name: &str,
    what: &str,
    items: &[UnmatchedCall],
    out: &mut impl Write,
) -> io::Result<()> {
    if items.is_empty() {
        return writeln!(out, "{name:12} 0");
    }
    writeln!(out, "{name:12} {} {what}", items.len())?;
    for item in items {
        let UnmatchedCall { run, call_id, input, output, cost, .. } = item;
        let model = item.model.as_deref().unwrap_or("-");
        let (run, call_id, model) =
            (PrintableBillText(run), PrintableBillText(call_id), PrintableBillText(model));
        writeln!(out, "    {run} {call_id}  {model}  {} in, {} out  ${cost}", input.0, output.0)?;
    }
    Ok(())
}

/// A line for a run that needs attention.
struct FlaggedRunText<'a>(&'a RunBill);

impl Display for FlaggedRunText<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let RunBill { run, account, overdue, unpriced, conflicting, .. } = self.0;
        write!(f, "flagged   run {run}, account {account}: ")?;
        for (at, flag) in self.0.flags.iter().enumerate() {
            let count = match flag {
                BillFlag::Unreceipted => overdue,
                BillFlag::Unpriced => unpriced,
                BillFlag::Conflicting => conflicting,
            };
            write!(f, "{}{count} {}", if at == 0 { "" } else { ", " }, flag.as_str())?;
        }
        Ok(())
    }
}

/// A line for a call whose amounts differ between the billing records and LiteLLM.
struct CallDifferenceText<'a>(&'a CallDifference);

impl Display for CallDifferenceText<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let CallDifference { run, call_id, input, output, cost_nanodollars, is_estimate, .. } =
            self.0;
        let model = PrintableBillText(self.0.model.as_deref().unwrap_or("-"));
        write!(
            f,
            "{run} {call_id}  {model}  {input:+} in, {output:+} out, {}",
            SignedDollars(*cost_nanodollars)
        )?;
        if *is_estimate { f.write_str(" (ours is an estimate)") } else { Ok(()) }
    }
}

/// An amount of money with a sign.
struct SignedDollars(i64);

impl Display for SignedDollars {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { '-' } else { '+' };
        write!(f, "{sign}${}", crate::llm::budget::Nanodollars(self.0.unsigned_abs()))
    }
}

/// Text from a client or from LiteLLM, made safe to print.
struct PrintableBillText<'a>(&'a str);

impl Display for PrintableBillText<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            c if c.is_ascii_graphic() => write!(f, "{c}"),
            c => write!(f, "{}", c.escape_unicode()),
        })
    }
}

fn write_json_line(value: &impl Serialize, out: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    writeln!(out)
}

/// The length of the date in an RFC 3339 time.
const DATE_LENGTH: usize = 10;
